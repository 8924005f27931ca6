"""The job server: runs requests as jobs, which survive restarts of every process, and stores their results."""
