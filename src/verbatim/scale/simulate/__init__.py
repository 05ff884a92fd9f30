"""`verbatim simulate`: a discrete-event model of one service: traffic, router, replicas.

traffic.py       arrivals: a Poisson mix, or a published trace
costs.py         seconds of one engine step, from measurements or from the roofline
fleet.py         the event loop over the real Scheduler and the real Decider, with a virtual clock
fleet_report.py  throughput and latencies of a run, and the smallest fleet that meets a target
"""
