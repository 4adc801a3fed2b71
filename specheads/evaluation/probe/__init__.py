"""What speculation would be worth for a pair on this machine, before anything is trained."""
