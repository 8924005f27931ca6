"""Sends a prompt to a running `stagemesh up speech`, prints the text and saves the audio while they are generated."""

from stagemesh.client import AudioChunk, Client, Text, WavWriter

with Client("127.0.0.1:7780") as client, WavWriter("speech.wav") as wav:
    for event in client.generate("Tell me about the sea.", outputs=["text", "audio"], max_tokens=80):
        if isinstance(event, Text):
            print(event.delta, end="", flush=True)
        elif isinstance(event, AudioChunk):
            wav.write(event.samples, sample_rate_hz=event.sample_rate_hz)
