"""`python -m trl_opsd`: the command `trl-opsd`, also behind `accelerate launch -m trl_opsd train`."""

from trl_opsd.cli.main import main

if __name__ == "__main__":
    main()
