"""`stagemesh conformance`: checks a running stage of any language against docs/protocol.md.

The tool plays the orchestrator, the producer and the consumer of the stage. It uses the generated stubs and the
protocol alone, and none of the data plane of Stagemesh: the same defect cannot be in both ends.
"""
