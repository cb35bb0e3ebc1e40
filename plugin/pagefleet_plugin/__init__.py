"""`kubectl pagefleet`: what a fleet does now, why it has so many replicas, and a way to talk to it.

Talks to clusters through kubectl alone, so every context, login and proxy that works there works here. Imports none of
the other packages.
"""
