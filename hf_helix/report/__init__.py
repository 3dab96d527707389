"""What people look at, as text and as pictures.

bars          one form for what ran and what is predicted, which the next two draw
timeline      which stream runs what, and when
strands       two layers under two plans, on one axis of time
pipeline      what every rank of a schedule runs
heatmap       which operators overlap well, and where time goes
operators     what a rank runs, and how its parameters are cut, as text
comparison    what a plan gains over others, here and on other links
scorecard     what one plan hides
live          the figures of the logs
flops         work of a model, peaks of devices
perfetto      traces for ui.perfetto.dev
figures       how every picture is made and saved
"""
