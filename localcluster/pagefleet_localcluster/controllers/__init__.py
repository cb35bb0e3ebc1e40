"""Deployment, ReplicaSet, Service, garbage collection, scheduling: clients of any Kubernetes API."""
