"""Stored media: the object store that stages and the media service read and write, and the media service."""
