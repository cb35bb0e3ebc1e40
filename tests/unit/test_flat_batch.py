import torch

from pagefleet_server.core.sampling_params import SamplingParams
from pagefleet_server.core.step import Fork, ScheduledRequest, SchedulerOutput
from pagefleet_server.runner.flat_batch import flatten

PARAMS = SamplingParams(max_tokens=1)
CPU = torch.device("cpu")


def test_decodes_and_chunks_become_flat_arrays() -> None:
    decode = ScheduledRequest("d", (7,), 17, (4, 9), True, PARAMS)
    middle = ScheduledRequest("m", (1, 2, 3), 15, (2, 6, 8), False, PARAMS)
    last = ScheduledRequest("l", (5, 6), 0, (3,), True, PARAMS)
    batch = flatten(SchedulerOutput((decode, middle, last), 1, 6), block_size=16, device=CPU)
    assert batch.token_ids.tolist() == [7, 1, 2, 3, 5, 6]
    assert batch.positions.tolist() == [17, 15, 16, 17, 0, 1]
    attention = batch.attention
    assert attention.slot_mapping.tolist() == [9 * 16 + 1, 2 * 16 + 15, 6 * 16, 6 * 16 + 1, 48, 49]
    assert attention.query_starts.tolist() == [0, 1, 4, 6]
    assert attention.seq_lens.tolist() == [18, 18, 2]
    assert attention.block_tables.tolist() == [[4, 9, 0], [2, 6, 8], [3, 0, 0]]
    assert (attention.num_decodes, attention.max_query_len, attention.max_seq_len) == (1, 3, 18)
    assert batch.logit_rows.tolist() == [0, 5]
    assert [request.request_id for request in batch.sampled] == ["d", "l"]
    assert attention.seq_lens.dtype == attention.block_tables.dtype == attention.query_starts.dtype == torch.int32
    assert attention.slot_mapping.dtype == batch.token_ids.dtype == batch.logit_rows.dtype == torch.int64


def test_forks_draw_from_the_row_of_their_leader() -> None:
    other = SamplingParams(max_tokens=1, seed=7)
    plain = ScheduledRequest("p", (7,), 17, (4, 9), True, PARAMS)
    leader = ScheduledRequest("l", (5, 6), 0, (3,), True, PARAMS, forks=(Fork("f", other), Fork("g", PARAMS)))
    batch = flatten(SchedulerOutput((plain, leader), 1, 3), block_size=16, device=CPU)
    assert batch.logit_rows.tolist() == [0, 2]
    assert [draw.request_id for draw in batch.sampled] == ["p", "l", "f", "g"]
    assert batch.sampled[2].sampling is other
    assert batch.draws_from is not None
    assert batch.draws_from.tolist() == [0, 1, 1, 1]
    assert flatten(SchedulerOutput((plain,), 1, 1), block_size=16, device=CPU).draws_from is None


def test_scored_prompt_rows_stand_before_the_draw_of_their_request() -> None:
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    plain = ScheduledRequest("p", (7,), 17, (4, 9), True, PARAMS)
    middle = ScheduledRequest("m", (1, 2, 3), 4, (2,), False, scored, prompt_targets=(3, 8), scored_from=1)
    last = ScheduledRequest("l", (5, 6), 0, (3,), True, scored, prompt_targets=(6,))
    batch = flatten(SchedulerOutput((plain, middle, last), 1, 6), block_size=16, device=CPU)
    assert batch.logit_rows.tolist() == [0, 2, 3, 4, 5]
    assert [(entry.request.request_id, entry.first_row) for entry in batch.scores] == [("m", 1), ("l", 3)]
    assert batch.draws_from is not None
    assert batch.draws_from.tolist() == [0, 4]
    assert [draw.request_id for draw in batch.sampled] == ["p", "l"]
