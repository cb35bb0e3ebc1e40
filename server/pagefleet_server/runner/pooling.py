"""A step of an embedding model: sums of hidden states instead of drawn tokens."""

import torch

from pagefleet_server.core.step import SchedulerOutput, StepResult

NO_STATES = "the model's hidden states for this request are no numbers"


def pool_rows(states: torch.Tensor, step: SchedulerOutput) -> StepResult:
    """states [T, H] of the step's rows -> for each request the sum over its pooled_rows, in float32. Requests whose sum
    is NaN or infinite fail alone."""
    sums: dict[str, bytes] = {}
    failed: dict[str, str] = {}
    first = 0
    for request in step.scheduled:
        rows = request.pooled_rows
        if rows:
            total = states[first + rows.start : first + rows.stop].float().sum(0).cpu()
            if torch.isfinite(total).all():
                sums[request.request_id] = total.numpy().astype("<f4").tobytes()
            else:
                failed[request.request_id] = NO_STATES
        first += len(request.token_ids)
    drawn = {request.request_id: 0 for request in step.scheduled if request.sample and request.request_id not in failed}
    return StepResult(sampled=drawn, pooled=sums, failed=failed)
