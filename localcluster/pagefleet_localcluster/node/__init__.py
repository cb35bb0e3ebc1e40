"""A node that runs pods as local processes: a client of any Kubernetes API."""
