"""Import and export of Grok-1: the released checkpoint and its Hugging Face conversions."""
