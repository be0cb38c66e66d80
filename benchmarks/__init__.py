"""Benchmarks that compare Linnet with baselines or put a server under load. They run from a checkout and are not installed:

    python -m benchmarks.scaling           # linear and dense attention by sequence length
    python -m benchmarks.serve_http        # a real server: restart, first tokens, sessions, 64 streaming clients
    python -m benchmarks.import_memory     # peak memory of importing a Grok-1 checkpoint

`linnet bench` measures a model on the user's own machine. Both use the same measurement code (`linnet.bench`).
"""
