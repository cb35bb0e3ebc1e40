"""How fast the fleet simulator is: an hour of 5 requests/s over 16 replicas, on one core.

    python benchmarks/simulator.py [--seconds 3600]

Prints CPU seconds, so that neighbours on the machine do not count, with runs of decode steps made at once and singly.
"""

import argparse
import time

from pagefleet_simulator.generators import generate, steady
from pagefleet_simulator.policies.simple import Static
from pagefleet_simulator.profile import load_profile
from pagefleet_simulator.scenario import Scenario
from pagefleet_simulator.simulation import simulate


def main() -> None:
    """One line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="simulated time")
    parser.add_argument("--singly", action="store_true", help="also with every step made singly")
    options = parser.parse_args()
    load = generate("steady", steady(5.0), options.seconds, seed=1)
    scenario = Scenario(load_profile("h100-qwen3-32b"), initial_replicas=16, max_replicas=16)
    for skips in (True, False) if options.singly else (True,):
        began = time.process_time()
        outcome = simulate(load, scenario, Static(16), skips=skips)
        spent = time.process_time() - began
        way = "runs of decodes at once" if skips else "every step singly"
        print(f"{way}: {spent:.1f} CPU s for {len(load.arrivals)} requests and {outcome.num_steps} steps")


if __name__ == "__main__":
    main()
