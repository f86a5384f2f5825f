"""What produces the figures that the README and the decisions quote: each prints ratios measured in one run."""
