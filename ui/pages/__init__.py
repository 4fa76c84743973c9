"""The pages: each builds its own components and events, from a context."""
