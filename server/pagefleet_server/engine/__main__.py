"""`python -m pagefleet_server.engine`: started by the API process only."""

import sys

from pagefleet_server.engine.parent import leave_signals_to_parent

if __name__ == "__main__":
    leave_signals_to_parent()  # before all that takes longer to import: ctrl-C comes at any time
    from pagefleet_server.engine.process import main
    from pagefleet_server.engine.real_runner import build_runner

    main(sys.argv[1:], build_runner)
