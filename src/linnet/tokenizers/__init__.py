"""Tokenizers: bytes, sentencepiece and Hugging Face files."""
