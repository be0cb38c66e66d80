"""`linnet bench`: how fast and how large a model is here, each figure measured in a process of its own."""
