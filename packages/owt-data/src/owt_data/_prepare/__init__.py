"""From documents to token files, on all cores, in a way that survives a kill."""
