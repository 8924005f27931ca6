"""Imports vLLM as a stage does. The process that forks engine cores imports this module."""

from stagemesh.services.engines.vllm.engine_core import preload

preload()
