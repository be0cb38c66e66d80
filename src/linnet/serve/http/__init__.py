"""The engine over HTTP, in OpenAI's shapes: everything that knows of sockets, keys or JSON lives here and nowhere else."""
