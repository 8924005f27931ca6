"""The parts that codec speech models share: streaming decoders, and the function that runs them as a vocoder stage."""
