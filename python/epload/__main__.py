import sys

from epload.cli.main import main

sys.exit(main())
