"""`gem-ctl simulate`: simulates workers and servers in time, with measured costs. It computes no gradient and no θ."""
