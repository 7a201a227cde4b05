import sys

from epload.cli import main

sys.exit(main())
