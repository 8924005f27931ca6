"""OpenAI's realtime API: conversations over a WebSocket."""
