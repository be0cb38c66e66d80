"""Preparation of a source: documents to tokens, splits and shards."""
