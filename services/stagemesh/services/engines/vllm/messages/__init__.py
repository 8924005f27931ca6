"""Separates the messages of a language model into reasoning, text and tool calls, by vLLM's own parsers.

`parsers` selects the parsers, `calls` finds tool calls, and `feature` reads the message of each request.
"""
