"""The descriptors of the transforms that process text."""

from stagemesh.common.descriptors import TransformDescriptor
from stagemesh.common.tensors import TensorSpec

_TEXT = {"text": TensorSpec("uint8", ("bytes",))}

SENTENCES = TransformDescriptor(takes=_TEXT, gives=_TEXT, factory="stagemesh.services.models.sentences:Sentences")
