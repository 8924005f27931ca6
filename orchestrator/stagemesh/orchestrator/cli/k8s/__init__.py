"""`stagemesh k8s`: prepares the deployment of a pipeline by the Helm chart."""
