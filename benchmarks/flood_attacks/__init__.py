"""The attacks of the benchmark `flood`, each in a process of its own."""
