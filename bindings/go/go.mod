module turboattention

go 1.19
