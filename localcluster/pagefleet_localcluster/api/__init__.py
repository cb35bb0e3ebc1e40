"""The embedded Kubernetes API server.

From the door inwards: `server` (HTTP, tokens, discovery) -> `handlers`, `watch_stream`, `node_proxy` (verbs) ->
`writes`, `deletion`, `reads`, `scale`, `pod_actions` (what happens to objects) -> `strategies`, `workloads`, `crds`,
`admission`, `metadata` (rules of kinds) -> `ownership`, `patches`, `schema`, `validation`, `cel_rules`, `crd_rules`,
`selectors`, `tables` (pure functions of objects) -> `store` (versions, history) and `journal` (disk).
`collector` and `event_expiry` run beside the requests.

Everything below `handlers` is synchronous: one request is one step of the event loop, so no object is ever seen half
written and no lock is needed. Built-in types and CRDs share one form of schema (`builtin_types`).

Imports nothing else of this package but `kubeconfig` (the token that nodes ask for): controllers and nodes are clients
over HTTP like any other."""
