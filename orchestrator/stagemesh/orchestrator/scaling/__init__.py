"""The signals by which stages are scaled, KEDA's interface to them, and the warm tier of sleeping replicas."""
