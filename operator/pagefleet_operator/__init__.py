"""The kopf operator: LLMDeployment -> Deployment, Service, replicas, status.

Never imports torch, the server or the kernels. Pure rooms (plan, autoscale, conditions, builders, model, names) never
import kopf, aiohttp or kubernetes."""
