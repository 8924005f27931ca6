"""The parts of models that are ours: functions, transforms, and how weights are fetched."""
