# SPDX-License-Identifier: Apache-2.0
"""Basic blocks of a kernel's machine code with their instructions: bb.py FILE PART_OF_NAME LEAST. Needs cuobjdump."""
import re,sys,subprocess,collections
N=''
t=subprocess.run([N+'cuobjdump','-sass',sys.argv[1]],capture_output=True,text=True).stdout.split('Function : ')[1:]
want=sys.argv[2]
for f in t:
    name=f.split('\n')[0]
    if want not in name: continue
    ops=[]
    for l in f.split('\n'):
        m=re.match(r'\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);',l)
        if m: ops.append((int(m[1],16),m[2]))
    targets=set()
    for a,o in ops:
        if 'BRA' in o or 'BSSY' in o:
            m=re.search(r'0x([0-9a-f]+)',o)
            if m: targets.add(int(m[1],16))
    bb=[];cur=[]
    for a,o in ops:
        if a in targets and cur: bb.append(cur);cur=[]
        cur.append((a,o))
        if re.search(r'\b(BRA|EXIT|RET|BRX)\b',o): bb.append(cur);cur=[]
    print(name,len(ops),'instructions')
    for b in bb:
        c=collections.Counter()
        for a,o in b:
            w=[x for x in o.split() if not x.startswith('@')][0].split('.')[0]
            c[w]+=1
        if len(b)>=int(sys.argv[3]) : print(hex(b[0][0]),len(b),dict(c.most_common(12)), '->', b[-1][1][:30])
