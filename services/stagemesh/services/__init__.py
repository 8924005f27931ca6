"""The services that compute: stages with their engines, and the media service."""
