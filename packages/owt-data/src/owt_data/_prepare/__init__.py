"""Preparation of token files: tokenize documents into shards on all cores, resume after a kill, write the splits."""
