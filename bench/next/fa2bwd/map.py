# SPDX-License-Identifier: Apache-2.0
"""A kernel's machine code, a letter an instruction (M HMMA, L LDSM, e MUFU, s STS, l LDS, c LDGSTS, | BAR, R RED): map.py FILE. Needs cuobjdump."""
import re,sys,subprocess
N=''
t=subprocess.run([N+'cuobjdump','-sass',sys.argv[1]],capture_output=True,text=True).stdout.split('Function : ')[1:]
lo=int(sys.argv[2],16) if len(sys.argv)>2 else 0; hi=int(sys.argv[3],16) if len(sys.argv)>3 else 1<<30
for f in t:
    print(f.split('\n')[0])
    ops=[]
    for l in f.split('\n'):
        m=re.match(r'\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);',l)
        if m: ops.append((int(m[1],16),m[2]))
    ops=[o for o in ops if lo<=o[0]<hi]
    code=[]
    for a,o in ops:
        w=[x for x in o.split() if not x.startswith('@')][0]
        c={'HMMA':'M','LDSM':'L','MUFU':'e','BAR':'|','STS':'s','LDS':'l','BRA':'B','LDG':'G','STG':'T','LDGSTS':'c','F2FP':'p','WARPSYNC':'w','CCTL':'C','MEMBAR':'F','LDL':'<','STL':'>','RED':'R','REDG':'R','ATOMG':'R','LDGDEPBAR':'d','DEPBAR':'D','CALL':'K','I2F':'i','F2I':'i'}.get(w.split('.')[0],'.')
        code.append(c)
    s=''.join(code)
    for i in range(0,len(s),160): print(hex(ops[i][0]),s[i:i+160])
