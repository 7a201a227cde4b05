from epload.cli.main import main

main()
