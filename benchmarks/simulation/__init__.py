"""The environment of `benchmarks.simulate`: virtual time and simulated stages."""
