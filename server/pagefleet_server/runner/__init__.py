"""From a scheduled step to sampled tokens: flat arrays, model call, sampler."""
