"""Evaluation of language models and priors."""
