"""OpenAI-compatible HTTP API of the engine. All code that handles sockets, API keys or JSON is in this package."""
