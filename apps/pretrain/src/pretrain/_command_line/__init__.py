"""The command line: its options, its help, its errors, and configurations in files."""
