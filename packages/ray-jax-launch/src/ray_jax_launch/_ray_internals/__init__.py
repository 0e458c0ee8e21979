"""The only modules that use private modules of Ray, which may change with any version: `pyproject.toml` bounds it."""
