"""A Kubernetes API, controllers and a process node for one laptop.

Stands where a cluster would: tests and the demo run against it. Imports none of the other packages."""
