"""The next plan, from the one before and the chips that there are."""
