"""Responses of OpenAI's Responses API: their bodies, their events, and those that are stored."""
