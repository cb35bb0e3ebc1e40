"""Runs workloads through OpenVINO GenAI in this process: a line of JSON in, a line of JSON out.

Runs in OpenVINO's own environment, so it imports nothing of the project. In: {"requests": [[prompt, num_output, at]],
"concurrency": n}. Out: {"answers": [[sent, [token times], num_prompt, num_output]]}.
"""

import json
import sys
import time
from typing import Any

import openvino_genai as genai  # type: ignore[import-not-found]


def run(pipeline: Any, tokenizer: Any, requests: list[list[Any]], concurrency: int) -> list[list[Any]]:
    """The answers of one workload, in its order."""
    answers: list[list[Any]] = [[0.0, [], 0, 0] for _ in requests]
    waiting = list(range(len(requests)))[::-1]
    running: dict[int, Any] = {}
    began = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            index = waiting[-1]
            prompt, num_output, at = requests[index]
            now = time.perf_counter()
            if at is not None and now < began + at:
                break
            waiting.pop()
            config = genai.GenerationConfig()
            config.max_new_tokens = num_output
            config.ignore_eos = True
            config.do_sample = False
            ids = tokenizer.encode(prompt, add_special_tokens=False).input_ids
            answers[index][0] = now
            answers[index][2] = int(ids.shape[1])
            running[index] = pipeline.add_request(index, ids, config)
        if not pipeline.has_non_finished_requests():
            time.sleep(0.001)
            continue
        pipeline.step()
        now = time.perf_counter()
        for index, handle in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    answers[index][1].append(now)
                    answers[index][3] += len(output.generated_ids)
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del running[index]
    return answers


def main() -> None:
    """Load, say so, then serve lines until the input ends."""
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = True
    scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens = 512
    pipeline = genai.ContinuousBatchingPipeline(
        sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])}
    )
    tokenizer = pipeline.get_tokenizer()
    run(pipeline, tokenizer, [["Hello", 1, None]], 1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        print(json.dumps({"answers": run(pipeline, tokenizer, work["requests"], work["concurrency"])}), flush=True)


if __name__ == "__main__":
    main()
