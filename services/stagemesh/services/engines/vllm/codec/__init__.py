"""Support for codec language models: the first code of each audio frame is sampled by vLLM, the others by a code
predictor.
"""
