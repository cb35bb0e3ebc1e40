"""What users of other servers complained of, each with the tests that keep it from happening here.

The left column names the complaint; the right one tests of this suite, which must exist. A renamed test fails here."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
OVERLOAD, FRONT_DOOR = "integration/test_api_overload.py", "integration/test_api_front_door.py"
SERVING, BAD_INPUT = "integration/test_api_serving.py", "integration/test_api_bad_input.py"
PLAN, CANCEL = "unit/test_scheduler_plan.py", "unit/test_scheduler_cancellation.py"
ONE_ARITHMETIC, PARITY = "integration/test_engine_one_arithmetic.py", "integration/test_greedy_parity.py"
SPLITS = "property/test_api_detokenizer_splits.py"
COMPLAINTS: dict[str, list[str]] = {
    "the engine dies or deadlocks, the API still answers 200": [
        f"{OVERLOAD}::test_a_killed_engine_ends_streams_with_an_error_and_the_process_with_the_reason",
        f"{OVERLOAD}::test_a_hanging_engine_fails_liveness_and_nothing_else_hangs",
    ],
    "a frozen loop passes health": [f"{OVERLOAD}::test_a_hanging_engine_fails_liveness_and_nothing_else_hangs"],
    "health takes half a minute under load": [
        "integration/test_api_about.py::test_probes_answer_while_long_prompts_are_tokenised",
        "unit/test_api_large_body.py::test_too_many_values_are_refused_before_they_are_made",
    ],
    "a prompt of 27 MB freezes everything": [
        f"{OVERLOAD}::test_a_request_body_beyond_the_limit_is_413",
        "unit/test_api_admission.py::test_a_text_that_cannot_fit_is_refused_by_its_bytes",
    ],
    "a request larger than the cache blocks the queue for ever": [
        f"{PLAN}::test_request_that_can_never_run_is_refused_with_the_numbers",
        "integration/test_model_gate.py::test_context_is_capped_by_flag_and_by_blocks",
    ],
    "nothing runs, five wait, probes are green": [
        f"{PLAN}::test_requests_that_nothing_moves_are_an_error_not_a_silence",
        "property/test_scheduler_machine.py::test_scheduler_holds_under_any_sequence_of_calls",
    ],
    "preemption thrashes": [f"{PLAN}::test_blocks_on_their_way_back_save_others_from_preemption"],
    "a preempted request loses its place": [
        f"{PLAN}::test_preempted_request_goes_before_those_that_never_ran",
        "unit/test_waiting_queue.py::test_preempted_requests_go_first_in_their_own_order_whenever_they_were_preempted",
    ],
    "a fairness policy livelocks": [
        "property/test_scheduler_machine.py::test_scheduler_holds_under_any_sequence_of_calls"
    ],
    "one long prompt stalls all decodes": ["unit/test_step_time.py::test_long_prompt_beside_streams_is_cut_by_time"],
    "token usage climbs until nothing moves": [
        "integration/test_engine_soak.py::test_hundreds_of_requests_without_a_model"
    ],
    "an abort leaks or corrupts": [f"{CANCEL}::test_synchronous", f"{CANCEL}::test_overlapped"],
    "output is corrupted on a cache hit only": [
        f"{ONE_ARITHMETIC}::test_on_a_cache_hit",
        f"{PARITY}::test_with_a_prefix_cache_that_is_hit",
    ],
    "an unproven combination corrupts": [
        "integration/test_model_gate.py::test_architecture_that_would_be_wrong_is_refused"
    ],
    "first and later equal requests differ at temperature 0": [
        f"{ONE_ARITHMETIC}::test_in_one_batch",
        "integration/test_batch_invariance.py::test_tiny_llama_gives_the_same_bits_in_any_mixture",
    ],
    "prefix caching is broken on CPUs": [f"{PARITY}::test_with_a_prefix_cache_that_is_hit"],
    "the first delta leaks the prompt": [f"{SPLITS}::test_a_prompt_that_ends_inside_a_character_is_never_leaked"],
    "split characters become U+FFFD": [f"{SPLITS}::test_pieces_join_to_the_text_for_every_split"],
    "text behind the stop leaks": [
        "property/test_api_stop_strings_splits.py::test_the_result_does_not_depend_on_the_cuts",
        "unit/test_api_output_text.py::test_a_stop_string_across_tokens_ends_the_text_in_front_of_it",
    ],
    "usage comes unasked, or without its shape": [
        f"{SERVING}::test_a_stream_says_what_the_whole_answer_says",
        f"{SERVING}::test_usage_counts_tokens",
    ],
    "half of all splits give empty tool arguments": [
        "property/test_api_parsers_splits.py::test_calls_come_out_as_they_were_written",
        "property/test_api_parsers_splits.py::test_broken_calls_come_out_the_same_for_every_cut",
    ],
    "prompt_logprobs=-1 allocates 62 GiB": ["unit/test_api_bodies.py::test_values_out_of_bounds_are_refused_by_name"],
    "headers without bound": [f"{FRONT_DOOR}::test_slow_and_oversized_requests_are_cut_short"],
    "a grammar that validates and does not compile kills the engine": [
        "unit/test_api_grammar.py::test_what_cannot_be_had_is_refused",
        "unit/test_api_grammar_worker.py::"
        "test_what_cannot_be_built_or_costs_too_much_is_refused_and_the_next_one_served",
    ],
    "a template's complaint is a 500": [
        f"{SERVING}::test_a_templates_own_complaint_is_a_400",
        "integration/test_api_chat_template.py::test_what_goes_wrong_in_a_template_is_the_requests_fault",
    ],
    "max_tokens against the context: wrong text": [
        "unit/test_api_admission.py::test_an_explicit_overflow_is_refused_with_the_numbers",
        "unit/test_api_admission.py::test_defaults_are_cut_to_the_room",
    ],
    "a prompt that is too long stalls the queue": [
        f"{SERVING}::test_what_cannot_be_answered_is_refused_with_the_numbers"
    ],
    "a burst of 72 kills the engine": [f"{BAD_INPUT}::test_a_burst_of_requests_is_served_or_refused_and_forgotten"],
    "no bounded queue": [
        f"{OVERLOAD}::test_beyond_the_queue_is_503_with_retry_after_and_the_rest_is_served",
        f"{OVERLOAD}::test_the_tokens_that_wait_are_bounded_but_one_request_may_always_wait",
        f"{OVERLOAD}::test_waiting_has_an_end_and_running_has_none",
    ],
    "generation goes on after the client left": [f"{OVERLOAD}::test_a_client_that_leaves_ends_its_request"],
    "SIGTERM drops streams": [
        "integration/test_api_drain.py::test_clients_that_keep_sending_through_a_drain_lose_nothing",
        "integration/test_api_drain.py::test_pooled_clients_that_never_stop_sending_lose_nothing",
    ],
    "start-up is a black box": [
        f"{OVERLOAD}::test_while_the_engine_starts_probes_answer_and_requests_are_told_to_wait"
    ],
    "metrics vanish or are empty": [
        "unit/test_api_metrics.py::test_every_family_is_there_at_zero_from_the_start",
        "unit/test_api_metrics.py::test_the_docs_list_exactly_the_families_that_there_are",
    ],
    "output at temperature 0 depends on the batch": [
        "integration/test_batch_invariance.py::test_smollm2_gives_the_same_bits_in_a_batch_of_64"
    ],
}


@pytest.mark.parametrize("complaint", COMPLAINTS)
def test_each_complaint_has_its_tests(complaint: str) -> None:
    for name in COMPLAINTS[complaint]:
        file, _, test = name.partition("::")
        assert re.search(rf"^(async )?def {test}\(", (TESTS / file).read_text(), re.MULTILINE), name
