"""Transforms of text."""

from stagemesh.connectors.tensors import TensorSpec
from stagemesh.services.serving.plugins import TransformCard

_TEXT = {"text": TensorSpec("uint8", ("bytes",))}

SENTENCES = TransformCard(takes=_TEXT, gives=_TEXT, factory="stagemesh.services.models.sentences:Sentences")
